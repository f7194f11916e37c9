"""Inference algorithms, one file each: `build(log_joint, ...) -> Transform(init, update)`.

They see parameters and a log joint, never a model class, so they work on any network and any subset of its
weights.
"""
