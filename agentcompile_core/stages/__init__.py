"""The eight stages, one file each: capture, analyze, plan, advise, lower, validate, select, emit."""
