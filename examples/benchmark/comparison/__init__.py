"""The parts of ``peers.py``.

What is asked (``work``), of whom (``systems``, ``workers``), how it is timed (``timing``), and what is made of it
(``ratios``, ``checks``, ``show``).
"""
