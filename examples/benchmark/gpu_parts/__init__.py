"""The parts of ``gpu.py``: models made on the spot, checks, timing, and the page that is printed."""
