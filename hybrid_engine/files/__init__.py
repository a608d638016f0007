"""Files: safe reading of users' files, and writing that survives kills and full disks.

documents.py    YAML and JSON files of users: limits, and errors that name the file
durable.py      atomic writes, appended lines, replacement of whole directories; `naming` converts
                errors to FileError
reading.py      opening of files from untrusted sources: regular files of bounded size
checksums.py    checksums of a directory's files
model_files.py  the files of a Hugging Face model
hub.py          directory of a model, by path or by its id on the Hub
scratch.py      temporary directories, removed on SIGTERM as well
"""
