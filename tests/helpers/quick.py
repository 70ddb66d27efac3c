"""Programs compiled without LLVM's optimisations, which takes half the time.

For tests of logic, and of tolerances that this changes nothing about. Tests of bits run what users
run.
"""

import contextlib
import functools
import unittest.mock

import jax

from dspark_jax.decode import engine, programs, session, steps
from dspark_jax.runtime import backend

CACHED = {  # what keeps compiled programs, and the modules that know it by its name
    programs.programs: (engine, session),
    programs._jitted_prefill: (programs,),
    programs._jitted_rounds: (programs,),
    programs._jitted_seat: (programs,),
    steps._compiled: (steps,),
}
CACHES = [
    (modules, cached.__name__, functools.cache(cached.__wrapped__))
    for cached, modules in CACHED.items()
]


def all_caches() -> list:
    """The functions that keep programs, compiled in either way."""
    return [*CACHED, *(quickly for _, _, quickly in CACHES)]


def quick_options() -> dict:
    """Options for `jax.jit`: this backend's own, and no optimisation."""
    return {**(backend.compiler_options() or {}), "xla_backend_optimization_level": 0}


def quick_jit(function, **options):
    return jax.jit(function, compiler_options=quick_options(), **options)


@contextlib.contextmanager
def compiled_quickly():
    """Within it, all programs of the library are. None of them is used outside, nor one from
    outside within; the next time in this process they are there.
    """
    options = quick_options()
    with contextlib.ExitStack() as stack:
        replace = lambda *what: stack.enter_context(unittest.mock.patch.object(*what))
        replace(backend, "compiler_options", lambda: options)
        for modules, name, cached in CACHES:
            for module in modules:
                replace(module, name, cached)
        yield
