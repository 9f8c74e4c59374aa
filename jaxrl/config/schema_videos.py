"""Options of videos in rows of data. See schema.py, of which this is a part."""

from __future__ import annotations

from jaxrl.config.option import Option as O

VIDEOS = {
    "video_column": O("videos", "videos of a row's prompt, one or a list: a list of frames (in the forms of data.image_column), a folder of frames,"
                                " an animated GIF or WebP, {video: one of these, fps or times}; `video` where rows have no column `videos`;"
                                " empty = none", needs="data.image_column"),
    "video_fps": O(None, "frames taken a second; None = the checkpoint's: 2 of a Qwen3-VL, all of a Qwen2-VL and Qwen2.5-VL", float, bound=">0",
                   needs="data.video_column"),
    "video_max_frames": O(None, "a longer video is read with so many frames; None = the checkpoint's, 768", int, bound="1..8192",
                          needs="data.video_column"),
    "video_max_pixels": O(None, "larger frames are made smaller: pixels of all frames of a video for a Qwen3-VL, of one frame for the others;"
                                " None = the checkpoint's", int, bound=">0", needs="data.video_column"),
}
