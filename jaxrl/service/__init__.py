"""Serves the training protocol of the `tinker` SDK: the SDK's loop is the user's, devices and weights are here.

Read `app` first: it makes one process of `routes` (HTTP), `promises` (order and results), `trainer` and `sampler`
(devices). Started by `jaxrl serve tinker`. Nothing else in jaxrl imports this package.
"""
