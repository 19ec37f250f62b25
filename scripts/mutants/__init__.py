"""Mutated kernels, judged as candidates are: how many wrong kernels would the checks let pass?"""
