"""Memory that many share: taken before it is used, given back after."""


class Budget:
    """An amount of something, in whatever unit.

    Args:
        limit: All there is.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0

    def take(self, amount: int) -> bool:
        """Take `amount`, all of it or nothing."""
        if self.used + amount > self.limit:
            return False
        self.used += amount
        return True

    def give_back(self, amount: int) -> None:
        """Give what was taken back."""
        self.used -= amount
        if self.used < 0:
            raise AssertionError(f"{-self.used} more was given back than taken")
