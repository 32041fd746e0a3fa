"""A simulated CUDA device: the tests marked ``cuda`` on a machine without a GPU, on the CPU wheel of torch.

``shim`` registers a CUDA device with torch, before torch is imported. ``device.simulated_gpu`` is a context manager
inside which torch finds a GPU: tensors are fake tensors on "cuda", Inductor generates code for the GPU; launches,
copies and waits are noted. With values, each fake tensor has a twin on the CPU, and Triton's interpreter runs the
kernels. CONTRIBUTING.md says how to run it and what it cannot see.
"""
