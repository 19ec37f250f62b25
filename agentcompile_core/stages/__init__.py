"""The eight stages, one module or package each: capture, analyze, plan, advise, lower, validate, select, emit."""
