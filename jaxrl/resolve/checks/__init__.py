"""Rules over options, a module for each group: each rule returns problems as texts with field, value and remedy.

`common.check` collects all of them and raises one ConfigError.
"""
