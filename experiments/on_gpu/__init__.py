"""What gpu_check.py is made of: checks and timings for one Hopper GPU.

plan          sizes, the names of stages, targets
supervisor    runs the worker in a process of its own, and outlives it
worker        that process: runs the stages, one after the other
pack_checks, gather_checks, gradient_checks, op_checks, training_checks
              stages that compare results; compare has what they share
timings, parts, training_timings, training_parts
              stages that time; bench, layers and measure have what they share
inputs        random numbers

The supervisor's side, plan and supervisor, imports no JAX.
"""
