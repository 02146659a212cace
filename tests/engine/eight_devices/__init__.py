"""Checks on eight devices of the CPU, in a process of their own: `python -m tests.engine.eight_devices`.

Every function `check_*` of these modules runs and may raise. tests/engine/test_eight_devices.py runs all once
and has a test for each."""
