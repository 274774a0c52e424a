"""The legacy model's shape is that of the dense family."""

from inferkit.models.dense.arch import DenseArch, check_user_arch, parse_arch

__all__ = ["DenseArch", "check_user_arch", "parse_arch"]
