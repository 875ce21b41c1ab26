"""Complete Flower Apps of registered methods, as ``flwr-kd app`` writes them."""

from flwr_kd.app_files.project import AppProject

__all__ = ["AppProject"]
