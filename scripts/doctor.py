"""Print what works on this machine (torch, Vulkan, OpenGL, video, weights ...) and the fix for what does not.

Usage: ``.venv/bin/python scripts/doctor.py [--json PATH] [check ...]``. The file is run by path so that it works even
when the packages that ``nexus_lightning`` imports are missing.
"""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).resolve().parent.parent / "nexus_lightning" / "doctor.py"), run_name="__main__")
