"""Drills: inject a fault into a real vLLM or its monitoring, and require the alert to fire and to resolve.

    drills.py      alert -> drill, or why there is none                                                   pure
    faults.py      one function for each fault; leaving its block takes the fault away
    traffic.py     requests, good and bad, for as long as a block lasts
    lab.py         the lab that all this is done to, and what its Prometheus and Alertmanager say
    run.py         the loop and the table
    fake_nvidia_smi   stands in for the GPUs that a lab on a CPU does not have

Invariant: whatever happens, also Ctrl-C, a fault is taken away and every process that was started is stopped."""
