"""Towers that turn patches of images into features for the decoder: their configuration (config), parameters (rows),
function (tower), and where images and tokens lie (positions).
"""
