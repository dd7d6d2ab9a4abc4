//! The pool as CuPy's `CFunctionAllocator` takes it.
