"""Parts of planning/plan.py (run.mode=plan), in the order it uses them: targets, workload, programs, compiling,
collectives, roofline, fit.
"""
