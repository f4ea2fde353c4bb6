"""Load tests on locust: token-aware users, open-loop arrivals, workloads, SLO gates. See README.md beside this file."""
