"""A stand-in for torch with only what the agent uses to find out which Python has torch."""

__version__ = "2.13.0+tiny"


class version:
    cuda = None


class cuda:
    @staticmethod
    def is_available() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        return 0
