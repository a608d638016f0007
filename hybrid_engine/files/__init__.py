"""Files: what users write is read safely, and what the engine writes survives a kill, a power cut and a full disk.

documents.py   YAML and JSON files of users: limits, and errors that name the file
durable.py     atomic writes, appended lines, directories that are replaced as a whole; `naming` turns errors into
               FileError
reading.py     opening what somebody else may have put there: regular files of bounded size
checksums.py   of a directory's files, in a file beside them
model_files.py which files a Hugging Face model consists of
hub.py         a model's directory, by path or by its id on the Hub
scratch.py     temporary directories, and an end by SIGTERM that removes them
"""
