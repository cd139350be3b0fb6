"""From a recorded graph to a plan: fuse, legalize, place, schedule, plan memory; the verifier runs after each."""
