"""Values of `setting(on_resume=...)`: whether a setting may change when a run resumes, and what the change does."""

from __future__ import annotations

from areno.schema.fields import OnResume

_FROM_HERE, _SPEED = "from here on", "speed and memory change; results up to the order of floating-point sums"

EXPLICIT = OnResume("explicit", _FROM_HERE)
"""The default."""
NEVER = OnResume("never", "")
FROM_HERE = OnResume("harmless", _FROM_HERE)
SPEED = OnResume("harmless", _SPEED)
SPEED_AND_ORDER = OnResume("harmless", _SPEED, decides_order=True)
ORDER = OnResume("explicit", "other samples may be finished first, and so other prompts are trained in a step")
"""Replaces SPEED_AND_ORDER if steps train on whichever prompts are finished first."""
RUN_LENGTH = OnResume("harmless", "where the run ends, and with lr_decay_steps=null the learning rate from here on")
SAME_CONTENT = OnResume("harmless", "nothing, if it is the same model or data in another place")
KEEPS_FOLDER = OnResume("harmless", "nothing: the run keeps its folder")
FROM_STATE = OnResume("harmless", "nothing: the critic comes from the state")
NEW_RUNS = OnResume("harmless", "nothing: only a new run is tuned")
RECORDS = OnResume("harmless", "nothing: only which steps can be replayed")
