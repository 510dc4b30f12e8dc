"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

pytest_plugins = [
    "support.results",
    "support.runs",
    "support.wrapped",
    "support.engines",
    "support.checkpoints",
]

# A loaded machine is slow, not wrong: no example is timed. What else is active (the profile that
# hypothesis loads where the variable CI is set) stays as it is.
settings.register_profile("untimed", settings.default, deadline=None)
settings.load_profile("untimed")
