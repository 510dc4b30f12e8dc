"""What every room needs: rows and stages, whole files, progress, workers."""
