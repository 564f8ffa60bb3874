# SPDX-License-Identifier: Apache-2.0
"""`tune`: measure a running DDTREE server over budgets and concurrencies, and say which flags fit."""
