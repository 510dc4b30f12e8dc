"""Recordings: the stages of one run as a directory of safetensors and a manifest.

``RecordingWriter`` writes one, ``open_recording`` reads one. ``manifest.py`` has what a manifest
says, ``layer.py`` how tensors are named.
"""

from __future__ import annotations

from needlepoint.verify.recording.manifest import (
    CandidateRecord,
    Manifest,
    ProfileRecord,
    RecordingError,
)
from needlepoint.verify.recording.read import Recording, open_recording
from needlepoint.verify.recording.write import RecordingWriter, check_recording_target

__all__ = [
    "CandidateRecord",
    "Manifest",
    "ProfileRecord",
    "Recording",
    "RecordingError",
    "RecordingWriter",
    "check_recording_target",
    "open_recording",
]
