"""Which rows of an argument a scalar loop reads."""
import numpy as np


class Watched(np.ndarray):
    """An array that remembers which rows were read."""
    def __getitem__(self, place):
        self.rows.append(place[0])
        return super().__getitem__(place)


def rows_read(loop, x, name):
    """The rows of one argument that a loop over one head, with the arguments x of that head, reads, in order."""
    watched = x[name].view(Watched)
    watched.rows = []
    loop.__wrapped__(**x | {name: watched})
    return watched.rows
