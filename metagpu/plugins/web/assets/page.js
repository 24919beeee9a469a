"use strict";
fetch("/api/v1/view").then((answer) => answer.text()).then((text) => {
  document.getElementById("view").textContent = text;
});
