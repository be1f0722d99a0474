"""Kernels: the catalog of what exists, compiling it to cubins, the cache on disk, launching.

``arch`` and ``catalog`` say what there is, ``specialise`` and ``build`` turn one entry into a
cubin, ``cache`` keeps cubins between processes, ``batch`` builds many at once, ``launch`` runs
them. All but ``launch`` work without a GPU, and none of them loads NVRTC to find a kernel that
is already in the cache.
"""
