"""Sets of parameters of a job and what is done with them: policy (role), reference, critic, teachers, reward model; how
they are placed, saved and handed to engines (parameters, role.WeightSync).
"""
