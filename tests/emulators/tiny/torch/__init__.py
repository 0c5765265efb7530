"""Just enough of a torch for the agent's question which Python has one."""

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
