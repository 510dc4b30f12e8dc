"""Measurements that are run as modules: kernel times, byte sweeps, false alarms, memory."""
