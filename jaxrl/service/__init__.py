"""Serves the training protocol of the `tinker` SDK: the SDK's loop is the user's, devices and weights are here.

Read `app` first: it makes one process of `routes` (HTTP), `operations` (requests and results), `worker` (their order),
`trainer` and `sampler` (devices). Started by `jaxrl serve tinker`. Only jaxrl.serve imports this package.
"""
