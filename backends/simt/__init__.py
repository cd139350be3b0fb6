"""What devices share whose kernels run in blocks of threads: one table of ops, one way to record a plan, one memory.

A backend (`cuda`, `vulkan`) adds its driver, the text of its kernels in its own language, and its list of devices. All have the
same kernels under the same names with the same arguments; `ops/` says which runs which op. Knows no driver.
"""
