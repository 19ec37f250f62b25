"""Targets for tests that need some hardware, whichever: a made-up one with every capability that the core has a word for."""

from attrs import evolve

from ..ir.candidate import Feature
from ..ir.target import Target

FAKE = Target(name="fake", arch="fake_1", backend="fake", capabilities=tuple(Feature), lanes=32, sm_count=132, l2_bytes=60 << 20,
              shared_bytes_per_sm=228 << 10, shared_bytes_per_block=227 << 10, registers_per_sm=65536, threads_per_sm=2048,
              memory_bytes=141 << 30, memory_gbps=4800.0)
OLDER_FAKE = evolve(FAKE, name="older_fake", arch="fake_0", capabilities=(Feature.ATOMICS,), l2_bytes=40 << 20, memory_gbps=2039.0)
