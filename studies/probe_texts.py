"""Texts no model has read: written for the probes, in this file alone. About 1,500 characters each."""

from __future__ import annotations

PROSE = """\
When the ferry to Marrowick was cancelled for the third evening in a row, the harbour clerk opened her \
ledger, crossed out a line in green ink, and told the waiting families that the lighthouse keeper would \
lend them his kitchen. Nobody had expected that. The keeper was known for two things: his silence, and a \
brass barometer that he polished every Sunday before breakfast. Yet there he stood at the door with a \
lantern and eleven spoons.

They ate barley soup from saucepans. A boy named Tobit asked why the lamp turned slowly in fog and quickly \
in clear weather, and the keeper, after thinking for a long while, said that it did not; only the eye grew \
tired of waiting. The clerk wrote this down. Later a carpenter repaired the wobbling table with a folded \
timetable, which was of no other use that week, and two sisters taught everyone a song about a goat who \
wished to be a bishop.

By midnight the wind had shifted. The barometer fell, then rose again, as if it had changed its mind, and \
the windows stopped rattling one after another from the north side to the south. In the morning the ferry \
came in with its flag upside down and its captain asleep on a coil of rope. Nobody hurried to get aboard. \
The sisters washed the saucepans, Tobit wound the clock, and the keeper counted his spoons: there were \
twelve of them now. He put the last one into the drawer without a word, and never learned whose it had \
been.
"""

CODE = '''\
class Orchard:
    """Rows of trees, and baskets of what was picked from them."""

    def __init__(self, rows, trees_per_row=7):
        self.baskets = {}
        self.ladders = [None] * rows
        self.grid = [[0.0] * trees_per_row for _ in range(rows)]

    def ripen(self, warmth, rain=0.25):
        for row_number, row in enumerate(self.grid):
            for tree_number, weight in enumerate(row):
                growth = warmth * (1.0 - weight) + rain / (tree_number + 3)
                row[tree_number] = min(weight + growth, 4.5)
            if self.ladders[row_number] is not None:
                self.ladders[row_number].lean(row_number)

    def pick(self, row_number, picker, limit=12.5):
        if not 0 <= row_number < len(self.grid):
            raise IndexError(f"there is no row {row_number} in this orchard")
        basket = self.baskets.setdefault(picker, [])
        carried = sum(basket)
        for tree_number, weight in enumerate(self.grid[row_number]):
            if carried + weight > limit:
                break
            basket.append(weight)
            carried += weight
            self.grid[row_number][tree_number] = 0.0
        return carried

    def heaviest_basket(self):
        best_picker, best_weight = None, -1.0
        for picker, basket in sorted(self.baskets.items()):
            weight = sum(basket)
            if weight > best_weight:
                best_picker, best_weight = picker, weight
        return best_picker, round(best_weight, 2)
'''
