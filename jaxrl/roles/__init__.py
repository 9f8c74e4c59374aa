"""The sets of parameters of a job: policy (role), reference, critic, teachers, reward model; and how they are placed,
saved and synced to engines (parameters, role.WeightSync).
"""
