"""The parts of planning/plan.py, in the order it uses them: targets, workload, programs, compiling, collectives,
roofline, fit."""
