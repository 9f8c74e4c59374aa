"""What a config comes to: every open choice decided once (spec), and what cannot work refused before any device work
(checks, a module for each group of options).
"""
