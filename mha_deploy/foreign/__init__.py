"""Verification of ONNX files that anything else made.

onnx_file.py        what a file takes, gives and computes in
matching.py         which of its inputs is which of a bundle's
session.py          a file behind a bundle's inputs
against_bundle.py   a file against a bundle's reference
module.py           a PyTorch module out of a file that the user names, as a reference
drawing.py          cases for a file that no spec describes
against_module.py   a file against such a module
against_file.py     a file against another one
"""

from mha_deploy.foreign.against_bundle import verify_file
from mha_deploy.foreign.against_file import verify_against_file
from mha_deploy.foreign.against_module import verify_against_module

__all__ = ["verify_against_file", "verify_against_module", "verify_file"]
