"""Beginnings of texts of many kinds, which a model goes on with where no text for calibration is given.

That a model's own text serves for its quantisation is known from LLM-QAT (Liu et al. 2023) and later work.
"""

BEGINNINGS = (
    "The history of the lighthouse begins with",
    "In this chapter we look at how plants turn light into",
    "def read_lines(path):\n    \"\"\"Return the lines of a file",
    "#include <stdio.h>\n\nint main(void) {\n",
    "Dear Sir or Madam,\n\nI am writing to ask about",
    "Q: What is the difference between weather and climate?\nA:",
    "Ingredients: two eggs, a cup of flour,",
    "Once upon a time there was a miller who",
    "The committee met on Tuesday and decided that",
    "Theorem. Every bounded sequence of real numbers",
    "SELECT name, price FROM orders WHERE",
    "She opened the door, and the first thing that she saw was",
    "Patients who take this medicine should",
    "The price of copper rose last week because",
    "Die Sonne stand schon tief, als",
    "Le marché commence à huit heures, et",
    "El tren llega a la estación cuando",
    "Step 1: Turn off the power before you",
    "{\"name\": \"Ada\", \"born\": 1815, \"works\": [",
    "User: Could you explain how a refrigerator works?\nAssistant:",
    "The river flows from the mountains to",
    "Under the terms of this agreement the buyer shall",
    "To find the area of a triangle, multiply",
    "Yesterday's match ended two to one after",
    "<html>\n<head>\n<title>Opening hours</title>",
    "Our solar system has eight planets. The largest",
    "Why do cats purr? There are several",
    "Chapter 3\n\nThe rain had not stopped for",
    "Abstract. We study a method for",
    "Three things make a good knife:",
    "In 1969 people first walked on",
    "Translate to English: \"Guten Morgen\" means",
)  # fmt: skip
