# SPDX-License-Identifier: Apache-2.0
"""What holds for every test."""

from __future__ import annotations

import contextlib


# Beside other tests on two cores an example takes as long as it takes. In CI hypothesis thinks so by itself.
with contextlib.suppress(ImportError):
    from hypothesis import HealthCheck, settings

    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
