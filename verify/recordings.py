"""Recordings: the stages of one run as a directory of safetensors and a manifest.

``RecordingWriter`` writes one, ``open_recording`` reads one. See :mod:`needlepoint.verify.manifest`
for what a manifest says and :mod:`needlepoint.verify.recordings_layer` for how tensors are named.
"""

from __future__ import annotations

from needlepoint.verify.manifest import (
    CandidateRecord,
    Manifest,
    ProfileRecord,
    RecordingError,
)
from needlepoint.verify.recordings_read import Recording, open_recording
from needlepoint.verify.recordings_write import RecordingWriter, check_recording_target

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
