"""installation"""
