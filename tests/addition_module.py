"""Text of a module file that adds 100 numbers: the smallest thing to compile."""

MODULE = """
import torch

class Model(torch.nn.Module):
    def forward(self, a, b):
        return a + b

def get_inputs():
    return [torch.randn(100), torch.randn(100)]

def get_init_inputs():
    return []
"""
