"""For tests of plugins: doubles that misbehave on command, and the conformance kit."""
