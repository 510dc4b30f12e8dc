"""Fixtures and stand-ins that several rooms of tests share."""
