"""Live tensor storages of real jobs, counted exactly: what a damaged job needs beside a healthy one."""
