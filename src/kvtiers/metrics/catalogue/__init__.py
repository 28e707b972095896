"""The catalogue: every series that kvtiers exports, as data.

Owns names, types, units, labels with their closed values, and the words that explain them, a file
for each chapter. Knows neither how a value is found (`readout`) nor how it is written out
(`prometheus`). A series stands here when facts count it or a live part is asked for it, and not
before: nothing in this list stays 0 because nobody feeds it.

Names are without prefix. Counters end in `_total`; units are in the names where the field has not
fixed them otherwise.
"""

from __future__ import annotations

from kvtiers.metrics.catalogue import insight, mission, occupancy, requests, storage
from kvtiers.metrics.series import Series

CATALOGUE: tuple[Series, ...] = (
    *mission.SERIES,
    *storage.SERIES,
    *occupancy.SERIES,
    *insight.SERIES,
    *requests.SERIES,
)
"""Every series, in the order of the documentation and the exposition."""
