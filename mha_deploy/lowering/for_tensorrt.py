"""placeholder"""
from mha_deploy.lowering.portable import lower_to_portable as lower_for_tensorrt
