"""Worker processes that run the user's code, whatever it is for: processes and their supervisor, streams, how what a
user names or writes gets there. Nothing here knows rewards or environments; nothing but the standard library is used.
"""
