// Where pages have a word equally often in their titles and texts, the search lists those first in
// which a reader should begin: the lectures in their order, the mistakes, the words, the assignments.
"use strict";
const FIRST = ["lectures/00", "docs/student_bugs", "lectures/", "docs/glossary", "assignments/", "docs/symbols", "README", "docs/d", "docs/s"];
var Scorer = {
  score([docname, , , , score]) {
    const place = FIRST.findIndex(start => docname.startsWith(start));
    const number = docname.startsWith("lectures/") ? Number(docname.slice(9, 11)) / 100 : 0;
    return place < 0 ? score : score + (FIRST.length - place - number) / FIRST.length;
  },
  // As in Sphinx:
  objNameMatch: 11, objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 }, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2,
};
